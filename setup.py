"""Which folders are packages. Everything else is in pyproject.toml, which has no rule for folders outside the package."""

from setuptools import find_packages, setup

OUTSIDE = ("conf", "kernels", "recipes")  # folders of the repository that are installed inside the package


def packages() -> list[str]:
    outside = [name for folder in OUTSIDE for name in (folder, *(f"{folder}.{part}" for part in find_packages(folder)))]
    return [*find_packages(include=["drafttrain", "drafttrain.*"]), *(f"drafttrain.{name}" for name in outside)]


if __name__ == "__main__":  # as which setuptools runs it
    setup(packages=packages(), package_dir={f"drafttrain.{folder}": folder for folder in OUTSIDE})
