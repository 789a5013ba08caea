"""Settings for the fast tests."""

import os

from hypothesis import settings

# No deadline: a busy machine would fail examples at random.
settings.register_profile("zorse", deadline=None)
settings.load_profile("zorse")
# Tables are as wide as documented, whatever the terminal of whoever runs the tests says.
os.environ.pop("COLUMNS", None)
