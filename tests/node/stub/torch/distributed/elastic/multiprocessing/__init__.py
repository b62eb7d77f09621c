class SignalException(Exception):
    pass
