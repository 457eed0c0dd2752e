"""Everything that imports Ray: the session, placement, the actors as Ray actors, and the clients that call them."""
