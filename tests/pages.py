"""Reading a study's page."""

import base64
import gzip
import re


def unpacked(document, name):
    """The text of the compressed script element of this id: `rows` or `configs`."""
    text = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', document)[1]
    return gzip.decompress(base64.b64decode(text)).decode()
