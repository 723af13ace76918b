"""What the tables and sentences of the docs are made of: recorded scores, their contrasts, and generated pages."""
