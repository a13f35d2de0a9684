"""Where scores come from: a Python function of the user, or a shipped rule."""
