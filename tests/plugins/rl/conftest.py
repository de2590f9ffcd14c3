"""The trainer's model and data are those of this plug-in's tests, too."""

from tests.trainer.conftest import cache as cache
from tests.trainer.conftest import dataset as dataset
from tests.trainer.conftest import model_folder as model_folder
from tests.trainer.conftest import one_thread as one_thread
