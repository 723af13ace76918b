"""Dense prediction: detection and semantic segmentation with any backbone, encoding and joining.

`create_detector` and `create_segmenter` build models from names. Your own necks, heads and decoders are classes that
`register_neck`, `register_head` and `register_decoder` register.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
