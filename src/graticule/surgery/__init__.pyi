from .change import Certificate as Certificate
from .change import Drift as Drift
from .change import Share as Share
from .change import change_position as change_position
from .export import Exported as Exported
from .freeze import freeze as freeze
