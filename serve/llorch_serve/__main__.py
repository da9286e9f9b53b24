"""``python -m llorch_serve`` is ``llorch``: neither imports anything from the current folder."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python has put the current folder here, which may be a model's. (A ``llorch_serve`` in it has been imported by now.)
        del sys.path[0]
    from llorch_serve.cli import main

    main()
