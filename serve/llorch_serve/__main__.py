"""``python -m llorch_serve`` is ``llorch``."""

from llorch_serve.cli import main

if __name__ == "__main__":
    main()
