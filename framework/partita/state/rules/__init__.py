"""Update rules in plain torch over flat shards: a few thousand elements at a time, so that temporaries stay in the cache."""
