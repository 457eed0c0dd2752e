"""All modules that import Ray: the session, placement, and the actors as Ray actors with their clients."""
