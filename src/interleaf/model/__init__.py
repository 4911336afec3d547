"""One decoder for several families, told apart by the switches of a ModelSpec. Knows no file format."""
