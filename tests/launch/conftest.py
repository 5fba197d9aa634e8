"""What the tests of all of launch/ share: the schemas of the objects that clusters take."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "gke"))
