"""From a public function to the launch: call, dispatch, gradients, operators, tuning."""
