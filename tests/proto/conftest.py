def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="record the bytes on the wire")
