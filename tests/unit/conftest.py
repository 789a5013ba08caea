"""Settings for the fast tests."""

from hypothesis import settings

# No deadline: a busy machine would fail examples at random.
settings.register_profile("zorse", deadline=None)
settings.load_profile("zorse")
