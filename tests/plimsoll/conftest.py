"""Makes `rehearsing` importable: with `--import-mode=importlib` a test's folder is not on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
