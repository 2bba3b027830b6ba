"""From names to layouts: rules, annotations, and the ways from one layout to another."""
