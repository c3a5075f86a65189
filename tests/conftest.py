"""For all tests."""

import signal
import threading

from hypothesis import settings

# how long an example takes says more about the machine than about the code
settings.register_profile("partita", deadline=None)
settings.load_profile("partita")

# Where the tests are started in the background the shell has them ignore Ctrl-C, and so would every program that they start.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
