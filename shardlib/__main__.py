"""The command line: `python -m shardlib plan FILE.py:FUNCTION --target tpu:v5e:16x16 --mesh data=16,model=16`."""

import sys

from shardlib.planning._command import main

if __name__ == "__main__":
    sys.exit(main())
