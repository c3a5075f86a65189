"""Update rules that say what travels for their gradients."""
