"""What the tests are made with: fakes, oracles, harnesses and builders of inputs."""
