#!/usr/bin/env python3
"""The signature check of s3server.py against published vectors: AWS's test suite, and the examples of the S3 API reference."""
import hashlib, os, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run
import s3server

EMPTY = hashlib.sha256(b"").hexdigest()
SUITE = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
EXAMPLES = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def suite(method, query=""):
    headers = {"host": "example.amazonaws.com", "x-amz-date": "20150830T123600Z"}
    return s3server.signature(SUITE, method, "/", query, headers, ["host", "x-amz-date"], EMPTY, headers["x-amz-date"],
                              "us-east-1", "service")


def example(method, path, query="", body=b"", **more):
    headers = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z",
               "x-amz-content-sha256": hashlib.sha256(body).hexdigest(), **{k.replace("_", "-"): v for k, v in more.items()}}
    return s3server.signature(EXAMPLES, method, path, query, headers, sorted(headers), headers["x-amz-content-sha256"],
                              headers["x-amz-date"], "us-east-1", "s3")


def test_published_vectors():
    assert suite("GET") == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
    assert suite("POST") == "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"
    assert suite("GET", "Param2=value2&Param1=value1") == "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"
    assert example("GET", "/test.txt", range="bytes=0-9") == \
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert example("PUT", "/test%24file.text", body=b"Welcome to Amazon S3.", date="Fri, 24 May 2013 00:00:00 GMT",
                   x_amz_storage_class="REDUCED_REDUNDANCY") == \
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
    assert example("GET", "/", "lifecycle") == "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    assert example("GET", "/", "max-keys=2&prefix=J") == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"


run(globals())
