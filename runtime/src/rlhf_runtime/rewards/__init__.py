"""Where scores come from: a Python function of the user, a shipped rule, or a model."""


def model_path(index: int) -> str:
    """The place of a reward's model in the manifest, as messages tell it."""
    return f"rewards[{index}].model.path"
