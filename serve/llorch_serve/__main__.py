"""``python -m llorch_serve`` is ``llorch``.

What Python itself imports before this is beyond our reach: in a folder that is not trusted, use ``llorch`` or
``python -P -m``.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python has put the current folder here, which may be a model's.
        del sys.path[0]
    from llorch_serve.cli import main

    main()
