from .audit import audit_page as audit_page
from .explorer import Explored as Explored
from .explorer import compute_maps as compute_maps
from .explorer import pixels_of as pixels_of
from .explorer import write_explorer as write_explorer
from .report import Report as Report
from .report import run_page as run_page
