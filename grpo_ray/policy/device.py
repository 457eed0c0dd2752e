"""Moving what a training holds from one device to another."""

import torch


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Its state goes where the weights went; counters that it keeps on the host stay there."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device)
