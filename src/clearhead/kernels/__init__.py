"""How a tile, or a whole pass over the tiles, is computed."""
