"""Fixtures that many tests share."""

import os

# Tests must not depend on the terminal they run in.
os.environ["COLUMNS"] = "120"
os.environ.pop("FORCE_COLOR", None)
os.environ["NO_COLOR"] = "1"
