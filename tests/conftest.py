"""The scripts stand at the top of the repository; tests import them from there."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
