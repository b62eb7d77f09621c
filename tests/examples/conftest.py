"""Let the tests import the example as a script finds its neighbours: from its own directory."""

import sys

import pytest

from tests.examples.worlds import EXAMPLES

pytest.importorskip("accelerate", reason="the example needs the extra 'train'")
sys.path.insert(0, str(EXAMPLES))
