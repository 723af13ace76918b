from .audit import audit_page as audit_page
from .explorer import Explored as Explored
from .explorer import explored as explored
from .explorer import pixels_of as pixels_of
from .explorer import write_explorer as write_explorer
from .report import Report as Report
