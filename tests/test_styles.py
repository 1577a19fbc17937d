"""Models in the spellings of other code than Hugging Face's: what is fused of them, and that training is right."""

import pytest
import torch
from _runs import assert_training_as_accurate
from _styles import STYLES, styled
from _training import batch
from fused_backend.compiler import explain


@pytest.mark.parametrize("name", STYLES)
def test_training(name):
    backend = assert_training_as_accurate(styled(name))
    print(backend.report)
