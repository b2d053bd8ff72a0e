"""``python -m moe_conformance``."""

from moe_conformance.cli import main

if __name__ == "__main__":
    main()
