def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="record the bytes on the wire")
    parser.addoption("--operations", type=int, default=100_000, help="operations on the models")
