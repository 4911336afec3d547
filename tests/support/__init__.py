"""What the tests share: models, adapters and oracles. Never imports the package under test."""
