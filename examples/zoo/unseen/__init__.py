"""Ten environments and rewards with one fault each, which its docstring names."""
