"""Whether what GPU ranks launch can hang."""
