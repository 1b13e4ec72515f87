"""Whose an exception is: that of the request whose code raised it, or that of the whole process."""

import threading

__all__ = ["errors_of_requests"]


def errors_of_requests() -> type[BaseException]:
    """What ends a request alone where its own code raises it: a processor, a criterion, an exit rule, a handler.

    In the main thread handlers of signals raise `KeyboardInterrupt` and `SystemExit` in the middle of whatever runs, so
    there only an `Exception` is the request's. In another thread, such as a manager's, nothing comes from outside.
    """
    return Exception if threading.current_thread() is threading.main_thread() else BaseException
