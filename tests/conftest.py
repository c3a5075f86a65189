"""For all tests."""

from hypothesis import settings

# how long an example takes says more about the machine than about the code
settings.register_profile("partita", deadline=None)
settings.load_profile("partita")
