"""Views: what people and other tools look at - reports, pictures, dumps."""
