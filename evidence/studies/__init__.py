"""Studies, one file each with a function `study()`; `graticule study evidence/studies` lists them."""
