"""All cases: at least one for each op of the registry. Those with an aim come first, because the time may run out."""

from . import attention_cases, buffer_cases, elementwise_cases, loss_cases, norm_cases, product_cases
from .case import Case

CASES: list[Case] = [
    *norm_cases.CASES,
    *attention_cases.CASES,
    *loss_cases.CASES,
    *elementwise_cases.CASES,
    *buffer_cases.CASES,
    *product_cases.CASES,
]
