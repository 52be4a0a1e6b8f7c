"""How long will a batch take on a slice? One protocol (`core.policy.Predictor`), one file per answer."""
