"""From a public function to the launch: call, dispatch, gradients, torch operators, tuning."""
