"""The tasks of the library, one file each: image classification, language modeling, detection, segmentation.

Names are imported when they are first used: the recipes and options of a task need no PyTorch.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names
from graticule.tasks import classification, detection, language, segmentation  # noqa: F401 - registers the tasks

if TYPE_CHECKING:
    from graticule.tasks.classification import Classification, Mixing, Recipe, class_names, images_of
    from graticule.tasks.coco_scores import CocoScores
    from graticule.tasks.detection import Detection, DetectionRecipe
    from graticule.tasks.distillation import Distillation
    from graticule.tasks.image_causes import Causes, size_causes
    from graticule.tasks.image_crops import check_crop
    from graticule.tasks.image_evaluation import ImageEvaluation
    from graticule.tasks.image_scores import Mode, Score, check_sizes, evaluate, set_windows
    from graticule.tasks.language import LanguageModeling, TextRecipe, tokenizer_of
    from graticule.tasks.models import build_backbone, build_language_model
    from graticule.tasks.segmentation import Segmentation, SegmentationRecipe
    from graticule.tasks.text_evaluation import TextEvaluation
    from graticule.tasks.text_scores import TextScore, check_lengths, evaluate_text

__all__ = [
    "Causes",
    "Classification",
    "CocoScores",
    "Detection",
    "DetectionRecipe",
    "Distillation",
    "ImageEvaluation",
    "LanguageModeling",
    "Mixing",
    "Mode",
    "Recipe",
    "Score",
    "Segmentation",
    "SegmentationRecipe",
    "TextEvaluation",
    "TextRecipe",
    "TextScore",
    "build_backbone",
    "build_language_model",
    "check_crop",
    "check_lengths",
    "check_sizes",
    "class_names",
    "evaluate",
    "evaluate_text",
    "images_of",
    "set_windows",
    "size_causes",
    "tokenizer_of",
]

_HOMES = {
    "Causes": "image_causes",
    "Classification": "classification",
    "CocoScores": "coco_scores",
    "Detection": "detection",
    "DetectionRecipe": "detection",
    "Distillation": "distillation",
    "ImageEvaluation": "image_evaluation",
    "LanguageModeling": "language",
    "Mixing": "classification",
    "Mode": "image_scores",
    "Recipe": "classification",
    "Score": "image_scores",
    "Segmentation": "segmentation",
    "SegmentationRecipe": "segmentation",
    "TextEvaluation": "text_evaluation",
    "TextRecipe": "language",
    "TextScore": "text_scores",
    "build_backbone": "models",
    "build_language_model": "models",
    "check_crop": "image_crops",
    "check_lengths": "text_scores",
    "check_sizes": "image_scores",
    "class_names": "classification",
    "evaluate": "image_scores",
    "evaluate_text": "text_scores",
    "images_of": "classification",
    "set_windows": "image_scores",
    "size_causes": "image_causes",
    "tokenizer_of": "language",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
