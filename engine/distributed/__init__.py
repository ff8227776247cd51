"""Several processes that compute one model, or one service; loaded only when there are several."""
