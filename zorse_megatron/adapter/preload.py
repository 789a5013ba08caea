"""What a process imports before it forks ranks, so that no rank has to."""


def import_late_modules_of_stock() -> None:
    """Import what stock imports late in every run; starts no thread and no process group."""
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.models.default_tokenizer  # noqa: F401
