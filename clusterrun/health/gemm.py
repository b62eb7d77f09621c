def matmul_rate(device: str) -> float:
    import time

    import torch

    a = torch.ones(256, 256, device=device)
    s = time.perf_counter()
    (a @ a).sum().item()
    return 2 * 256**3 / (time.perf_counter() - s) / 1e12
