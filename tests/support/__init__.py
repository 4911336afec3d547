"""What the tests share: models, adapters, oracles and what "equal" means."""
