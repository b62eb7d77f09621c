"""Let the tests import the example as a script finds its neighbours: from its own directory."""

import sys
from importlib.util import find_spec

import pytest

from tests.examples.worlds import EXAMPLES

if find_spec("accelerate") is None:
    pytest.skip("the examples need the extra 'train'", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))
