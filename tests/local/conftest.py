"""Give these tests a project with the examples and the scripts of tests/scripts."""

from tests.road import a_project  # noqa: F401
