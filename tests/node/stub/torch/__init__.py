"""A stand-in for torch: no tensors, just what launches ranks and joins them."""


class cuda:
    @staticmethod
    def is_available():
        return False

    @staticmethod
    def device_count():
        return 0

    @staticmethod
    def is_initialized():
        return False


def save(what, where):
    raise NotImplementedError("there are no tensors")
