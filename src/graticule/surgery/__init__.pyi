from .change import Certificate as Certificate
from .change import Drift as Drift
from .change import Share as Share
from .change import change_position as change_position
from .export import Exported as Exported
from .export import export as export
from .export_program import Exportable as Exportable
from .freeze import freeze as freeze
